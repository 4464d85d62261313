"""Other systems that speculate, measured beside this one: one adapter a module, and what is made of their samples."""
