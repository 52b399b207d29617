"""One operator alone, against what the memory and the arithmetic units allow."""
