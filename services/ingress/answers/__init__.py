"""What generating routes answer, whole and as events: OpenAI's forms and our own. Pure."""
