"""What any module may use: errors, text, files, collectives. Imports nothing else of the package."""
