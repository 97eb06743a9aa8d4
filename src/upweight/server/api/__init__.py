"""The HTTP surface: routes that read and write the store and hand inference through to the workers."""
