"""HTTP client of the job API."""
