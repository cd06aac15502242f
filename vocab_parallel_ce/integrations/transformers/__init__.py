"""The integration with Hugging Face transformers."""
