"""What a fleet costs and brings: its gateway, kills, where requests go, and how soon a replica is left alone."""
