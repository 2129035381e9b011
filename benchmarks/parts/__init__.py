"""Run the child processes of benchmarks, and share code between benchmarks."""
