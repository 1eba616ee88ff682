"""Place: a Program of one device -> the program of each rank along a mesh axis that splits its values."""
