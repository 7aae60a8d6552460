"""What computes partials on a device: one backend per kind of device."""
