"""The text side: tokenizer, chat template, streams and the HTTP API."""
