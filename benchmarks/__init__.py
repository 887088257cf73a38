"""Side-by-side measurements against peers. See README.md here."""
