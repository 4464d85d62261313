"""The live view of a running system: what its metrics say, sampled, turned into figures, drawn."""
