"""Do prompts find the rows kept of earlier ones? Conversations, kills, tenants, a long prompt among other requests."""
