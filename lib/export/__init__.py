"""Export a checkpoint as a model or adapter that other libraries load, and check the result."""
