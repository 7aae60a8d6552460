"""Text of files: recognition, extraction in a confined process, folders and archives."""
