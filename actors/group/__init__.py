"""How the attempts of one task are played together and handed in."""
