from reft_daemon.start import main

main()
