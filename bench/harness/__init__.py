"""What measurements share: subjects, machines, hosts, ranks, services, and how seconds become rows."""
