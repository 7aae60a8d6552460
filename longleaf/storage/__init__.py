"""Where snapshots of contexts lie: objects under names, in a folder or an object store."""
