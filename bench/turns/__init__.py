"""Whether prompts find what was kept of those before: conversations, kills, tenants, a long prompt beside others."""
