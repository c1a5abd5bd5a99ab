"""What benchmarks of several rooms share: reports, running fleets and peers, and the yardsticks of a machine."""
