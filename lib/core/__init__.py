"""The foundation of all stages. It imports neither torch nor the libraries of Hugging Face."""
