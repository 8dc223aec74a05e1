"""How the benches measure: times, floors, references, shapes, and the cells of tables."""
