"""What streams lose while processes and servers are killed, hang or restart."""
