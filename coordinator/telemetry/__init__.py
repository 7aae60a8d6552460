"""What a service tells of itself: metrics, traces and logs."""
