"""Find personal data in text (e-mail addresses, IP addresses, numbers) and replace it."""
