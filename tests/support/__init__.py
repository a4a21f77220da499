"""What tests share: real daemons, real trainers, and waiting without sleeping."""
