"""Find near duplicates: signatures, candidates, exact comparison, and the plan of what to keep."""
