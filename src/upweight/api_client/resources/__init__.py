"""Resources of the job API."""
