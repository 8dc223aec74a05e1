"""Devices that compute together, and all replicas as one."""
