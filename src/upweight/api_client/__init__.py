"""The job API from the client's side."""
