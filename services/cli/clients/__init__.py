"""Commands that ask an ingress: generate, chat, explain and top."""
