"""Text: chat templates, tokenizer and detokenizer."""
