"""What overspill knows of other libraries, one file each. Only imported where that library is in use."""
