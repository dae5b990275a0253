"""Weight sources: Hugging Face folders, hub models and GGUF files."""
