from reft_daemon.main import main

main()
