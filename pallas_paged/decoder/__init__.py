"""What a decoder's layer needs around attention."""
