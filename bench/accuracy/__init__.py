"""How well a model predicts, finds and answers when it reads a few percent of its context: any model, any selector."""
