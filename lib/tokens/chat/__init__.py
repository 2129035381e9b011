"""Render conversations, tokenise them and compute their loss masks."""
