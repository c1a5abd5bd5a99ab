"""From messages to token ids: tokenizers, chat templates, and histories that are not rendered again."""
