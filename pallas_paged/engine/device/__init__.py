"""The state of the engine on the devices, and the jitted calls on it."""
