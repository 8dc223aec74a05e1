"""The page table, the KV pool, and what refers to their pages."""
