"""The door for HTTP: OpenAI's dialect, contexts and a page, in front of a service that speaks gRPC. Holds no state."""
