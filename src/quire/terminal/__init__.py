"""What commands show in a terminal: a chat, and what a running server does."""
