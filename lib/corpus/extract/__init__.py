"""Extract the text of HTML pages, PDF, DOCX and EPUB files, in a child process that may die."""
