"""Commands: parsing and printing only."""
