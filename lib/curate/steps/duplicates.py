"""Drop rows whose content equals that of an earlier row."""
