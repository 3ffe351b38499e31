"""Before the first attempt and after the last: prerequisites, suspension, the end."""
