"""What the tests share, in folders by purpose; two commands that are about all of them stand beside."""
