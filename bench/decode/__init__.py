"""How long a decode call takes, in each layout, and what a shared prefix saves."""
