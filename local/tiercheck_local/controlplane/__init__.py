"""Opens a control plane by one interface: the embedded one, or a real one."""
