"""What is kept of generations, so that another service can go on with them."""
