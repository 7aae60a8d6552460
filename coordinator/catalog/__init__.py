"""What is durable of a service's contexts: a folder for each model, and in it a database of contexts and token ids."""
