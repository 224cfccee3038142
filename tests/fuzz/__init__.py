"""Random scenarios on whole engines, judged by an oracle that keeps its own record of what the cache holds."""
